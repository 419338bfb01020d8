"""The processes of one vLLM server wait for each other without spinning; the tests' fork server imports this.

A process of vLLM polls its queue for a second after each message before it sleeps. On two cores, which other tests
need, that is a core for each process of a server with traffic. A message wakes a sleeping process at once.
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SpinCondition.__init__.__defaults__ = (0.001,)
