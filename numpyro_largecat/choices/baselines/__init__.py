# SPDX-License-Identifier: Apache-2.0
"""Biased estimators that the papers compare with."""

from numpyro_largecat.choices.baselines.noise_contrastive import NoiseContrastive

__all__ = ["NoiseContrastive"]
