# SPDX-License-Identifier: Apache-2.0
"""Biased estimates that the papers compare with."""
