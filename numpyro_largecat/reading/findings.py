# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis of a fit consists of, and how it prints."""

from __future__ import annotations

from typing import NamedTuple

ROUNDING = 1e-9  # below which an error is none


class Finding(NamedTuple):
    """One line of a diagnosis.

    Example:
        >>> from numpyro_largecat.reading.findings import Finding
        >>> Finding("R-hat of the ELBO", 1.01).value
        1.01
    """

    name: str
    value: float
    error: float | None = None  # Monte Carlo standard error
    advice: str = ""  # what to do; empty if nothing
    group: str = ""  # of findings that print as one line, worst first


class Diagnosis(NamedTuple):
    """What ``diagnose`` found; prints as a table.

    Example:
        >>> import numpyro_largecat as lc
        >>> from numpyro_largecat.reading.findings import Finding
        >>> print(lc.Diagnosis([Finding("R-hat of the ELBO", 1.31, advice="run longer")]))
        R-hat of the ELBO     1.31            run longer
    """

    findings: list[Finding]  # each with its name, value, error and advice

    def __str__(self) -> str:
        """One line for each finding, or group of them: name, value, its error, and what to do."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.group or finding.name, []).append(finding)
        findings = [_as_one(group) for group in groups.values()]
        lines = []
        width = max(len(finding.name) for finding in findings)
        for name, value, error, advice, _ in findings:
            spread = "" if error is None else f"± {0 if error < ROUNDING else error:.2g}"
            lines.append(f"{name:{width}s} {value:>8.3g} {spread:10s} {advice}".rstrip())
        return "\n".join(lines)


def _as_one(group: list[Finding]) -> Finding:
    """Findings of several parameters as one: the worst value, and for how many there is advice."""
    worst, *others = sorted(group, key=lambda finding: not finding.advice)
    if not others:
        return worst
    advised = [finding.name.split()[-1] for finding in group if finding.advice]
    of_worst = f"{len(advised)} of them, as {' and '.join(advised[:2])}: {worst.advice}"
    return Finding(
        f"{worst.group}, worst of {len(group)}", worst.value, None, of_worst * bool(advised)
    )
