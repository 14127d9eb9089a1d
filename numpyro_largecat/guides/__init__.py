# SPDX-License-Identifier: Apache-2.0
"""Guides whose parameters are rows of plates, and the priors that suit them."""
