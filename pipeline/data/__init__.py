"""Datasets: rows on disk, or on the Hub, as conversations by index.

| module | owns |
|---|---|
| `row_sources` | from a path to rows by number: JSON files directly, all others with the library `datasets` |
| `jsonl_index` | JSON files, each row exactly as it is written |
| `chat_messages` | one normalized form of a conversation, for every format of a row |
| `examples` | the meaning of a row's columns: `Examples`, by index |
| `preference_examples`, `labeled_examples` | preference pairs and labeled completions, by index |
| `dataset_digest` | one digest of all rows, by which a resumed run recognizes its data |

One reader for supervised fine-tuning and for reinforcement learning:

    examples = Examples.open(SourceConfig(path="chat.jsonl"))
    examples[7].prompt       # messages, up to the beginning of the policy's turn
    examples[7].columns      # the other columns of the row, for a reward

Knows neither tokens nor models.
"""

from pipeline.data.chat_messages import Conversation
from pipeline.data.examples import Example, Examples

__all__ = ["Conversation", "Example", "Examples"]
