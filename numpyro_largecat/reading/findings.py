# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis of a fit consists of, and how it prints."""

from __future__ import annotations

from typing import NamedTuple


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
        """One line for each finding: name, value, its error, and what to do."""
        lines = []
        width = max(len(finding.name) for finding in self.findings)
        for name, value, error, advice in self.findings:
            spread = "" if error is None else f"± {error:.2g}"
            lines.append(f"{name:{width}s} {value:>8.3g} {spread:10s} {advice}".rstrip())
        return "\n".join(lines)
