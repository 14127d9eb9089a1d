# SPDX-License-Identifier: Apache-2.0
"""Guides and parts of guides to pass to SVI."""

from numpyro_largecat.guides.error_guides import (
    AmortizedErrors,
    AutoError,
    ErrorGuideList,
    LocalErrors,
)

__all__ = ["AmortizedErrors", "AutoError", "ErrorGuideList", "LocalErrors"]
