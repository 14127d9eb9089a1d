# SPDX-License-Identifier: Apache-2.0
"""Sums over the L best values: categorical, mixture, ELBO."""
