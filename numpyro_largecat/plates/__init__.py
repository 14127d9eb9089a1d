# SPDX-License-Identifier: Apache-2.0
"""Idea 1: a plate says which rows exist this step."""
