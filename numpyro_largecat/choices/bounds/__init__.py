# SPDX-License-Identifier: Apache-2.0
"""Bounds of the likelihood of a choice, beside that of `UtilityCategorical`."""
