# SPDX-License-Identifier: Apache-2.0
"""Conjugate learning of mixtures of exponential families, with L-sparse responsibilities."""

from numpyro_largecat.mixtures.diagonal_gaussian import DiagonalGaussianFamily
from numpyro_largecat.mixtures.family import ConjugateFamily
from numpyro_largecat.mixtures.fit_mixture import fit_mixture
from numpyro_largecat.mixtures.gaussian import GaussianFamily, ZeroMeanGaussianFamily
from numpyro_largecat.mixtures.mixing import DirichletMixing, MixingPrior, StickBreaking
from numpyro_largecat.mixtures.mixture_fit import MixtureFit
from numpyro_largecat.mixtures.multinomial import MultinomialFamily

__all__ = [
    "ConjugateFamily",
    "DiagonalGaussianFamily",
    "DirichletMixing",
    "GaussianFamily",
    "MixingPrior",
    "MixtureFit",
    "MultinomialFamily",
    "StickBreaking",
    "ZeroMeanGaussianFamily",
    "fit_mixture",
]
