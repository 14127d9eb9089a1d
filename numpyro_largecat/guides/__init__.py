# SPDX-License-Identifier: Apache-2.0
"""Guides and parts of guides to pass to SVI."""

from numpyro_largecat.guides.error_guides import AutoError, ErrorGuideList
from numpyro_largecat.guides.error_posteriors import AmortizedErrors, LocalErrors

__all__ = ["AmortizedErrors", "AutoError", "ErrorGuideList", "LocalErrors"]
