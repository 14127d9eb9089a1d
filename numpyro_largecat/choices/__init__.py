# SPDX-License-Identifier: Apache-2.0
"""Idea 2: a likelihood is a distribution whose log density is a bound that sums over classes."""
