# SPDX-License-Identifier: Apache-2.0
"""Families and priors for ``fit_mixture``, and its options."""

from numpyro_largecat.mixtures.conjugate_family import ConjugateFamily
from numpyro_largecat.mixtures.diagonal_gaussian_family import DiagonalGaussianFamily
from numpyro_largecat.mixtures.gaussian_families import GaussianFamily, ZeroMeanGaussianFamily
from numpyro_largecat.mixtures.mixing_priors import DirichletMixing, MixingPrior, StickBreaking
from numpyro_largecat.mixtures.multinomial_family import MultinomialFamily
from numpyro_largecat.mixtures.options import Options

__all__ = [
    "ConjugateFamily",
    "DiagonalGaussianFamily",
    "DirichletMixing",
    "GaussianFamily",
    "MixingPrior",
    "MultinomialFamily",
    "Options",
    "StickBreaking",
    "ZeroMeanGaussianFamily",
]
