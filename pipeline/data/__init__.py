"""Datasets: rows on disk, or on the Hub, as conversations by index.

| module | owns |
|---|---|
| `row_sources` | from a path to rows by number: JSON files here, all else by the library `datasets` |
| `jsonl_index` | JSON files, each row exactly as it is written |
| `chat_messages` | one conversation in one form, whatever form its row had |
| `examples` | what the columns of a row mean: `Examples`, by index |
| `dataset_digest` | one digest of all rows, by which a resumed run knows its data again |

One reader for supervised fine-tuning and for reinforcement learning:

    examples = Examples.open(SourceConfig(path="chat.jsonl"))
    examples[7].prompt       # messages, up to where the policy speaks
    examples[7].columns      # what else the row says, for a reward

Knows neither tokens nor models.
"""

from pipeline.data.chat_messages import Conversation
from pipeline.data.examples import Example, Examples

__all__ = ["Conversation", "Example", "Examples"]
