# SPDX-License-Identifier: Apache-2.0
"""Array functions of the double sum."""
