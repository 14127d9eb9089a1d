# SPDX-License-Identifier: Apache-2.0
"""Inference that updates only the rows that a step touches."""
