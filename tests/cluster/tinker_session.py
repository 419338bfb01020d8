"""A client's script, with the public SDK alone: so many steps, each printed, with samples that are drawn beside each;
then the path of the adapter.

TINKER_BASE_URL=… TINKER_API_KEY=… python tinker_session.py 50
"""

import random
import sys

import tinker
from tinker import types


def datum(draw: random.Random) -> types.Datum:
    tokens = [draw.randrange(3, 17) for _ in range(draw.randrange(4, 13))]
    weights = [0.0, *([1.0] * (len(tokens) - 2))]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def main(steps: int) -> None:
    draw = random.Random(7)
    client = tinker.ServiceClient()
    trainer = client.create_lora_training_client(base_model="tiny_qwen3", rank=4, seed=11).result()
    sampler = client.create_sampling_client(base_model="tiny_qwen3").result()
    prompt, params = types.ModelInput.from_ints([3, 4, 5]), types.SamplingParams(max_tokens=100, stop=[])
    for step in range(steps):
        sampled = sampler.sample(prompt, 4, params)
        halves = [trainer.forward_backward([datum(draw) for _ in range(8)], "cross_entropy") for _ in range(2)]
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        losses = [half.result().metrics["loss:sum"] for half in halves]
        stepped.result()
        print("sampled", step, *(len(each.tokens) for each in sampled.result().sequences), flush=True)
        print("step", step, *(loss.hex() for loss in losses), flush=True)
    print("adapter", trainer.save_weights_for_sampler("end").result().path, flush=True)
    client.close("success").result()


if __name__ == "__main__":
    main(int(sys.argv[1]))
