# SPDX-License-Identifier: Apache-2.0
"""The double sum: linear softmax, one observation and class at a time."""
