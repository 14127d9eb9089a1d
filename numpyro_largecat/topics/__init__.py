# SPDX-License-Identifier: Apache-2.0
"""What ``fit_topics`` and ``TopicDocument`` give and take besides everyday names."""

from numpyro_largecat.topics.options import Options
from numpyro_largecat.topics.topic_document import DocumentPosterior
from numpyro_largecat.topics.topic_fit import TopWord

__all__ = ["DocumentPosterior", "Options", "TopWord"]
