"""A client of the SDK whose requests wait at the server, for tests that kill it: `flood_of_a_dead_client`.

`python -m tests.integration.tinker_flood URL KEY ROUTE COUNT` submits so many requests, logs each answer of the server,
and then does nothing. It imports little, so that it starts soon.
"""

import logging
import sys
import time

import tinker
from tinker import types

SAMPLES, SAMPLED_TOKENS = 8, 58


def main(url: str, key: str, route: str, count: int) -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
    client = tinker.ServiceClient(base_url=url, api_key=key)
    tokens, futures = [1, 5, 9, 3], []
    prompt = types.ModelInput.from_ints(tokens)
    if route == "asample":
        sampler = client.create_sampling_client(base_model="tiny")
        params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, stop=[])
        futures = [sampler.sample(prompt, SAMPLES, params) for _ in range(count)]
    else:
        trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
        datum = types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * 4})
        futures = [trainer.forward_backward([datum] * 100, "cross_entropy") for _ in range(count)]
    time.sleep(600)
    del futures


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
