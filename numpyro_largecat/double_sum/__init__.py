# SPDX-License-Identifier: Apache-2.0
"""Rules of ``fit_double_sum``, which ``sample_choice`` takes too."""

from numpyro_largecat.double_sum.rules import DoubleSumRule, ImplicitSGD, UMax, Vanilla

__all__ = ["DoubleSumRule", "ImplicitSGD", "UMax", "Vanilla"]
