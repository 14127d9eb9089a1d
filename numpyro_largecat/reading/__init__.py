# SPDX-License-Identifier: Apache-2.0
"""What a fit says: predictions over all classes, ArviZ, diagnosis, scores and pictures."""
