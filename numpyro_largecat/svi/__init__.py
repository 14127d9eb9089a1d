# SPDX-License-Identifier: Apache-2.0
"""Idea 3: a step of SVI updates only the rows that it touched."""
