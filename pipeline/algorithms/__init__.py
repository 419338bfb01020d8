"""Algorithms: the formulas of losses and advantages, as pure functions of flat arrays.

| module | owns |
|---|---|
| `policy_losses` | policy losses, token by token, and their list |
| `preference_losses` | losses of preference pairs with their gradients, and their list |
| `importance_correction` | importance weights of the sampling policy |
| `overlong_penalty` | the penalty of long answers |
| `value_losses` | the loss of a critic |
| `advantage_estimators` | from rewards to advantages, and the list of estimators |
| `kl_estimators` | estimates of a KL divergence, and their list |
| `support_divergence` | the divergence from a teacher over a few tokens of the vocabulary |
| `summed_losses` | plain sums over tokens for the Tinker API, and their list |
| `key_parameters` | the keys that a formula reads |
| `loss_tokens` | the tensors that every loss reads |
| `loss_metrics`, `token_statistics` | from sums to metrics; statistics over tokens as sums |

The keys `loss.name`, `loss.advantage_estimator`, `loss.kl_estimator` and `preference.loss` take their values from the
lists of functions here, and a key is refused for a loss whose function does not have it as a parameter. So a new loss
or estimator is one decorated function, and for a loss its file in `conf/loss/` (docs/contributing.md).
`pipeline.train.total_loss` adds the terms of a loss. Must not know configs, rows, models, ranks or packing.
"""
