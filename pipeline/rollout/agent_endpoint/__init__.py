"""An endpoint for one episode of an agent, with OpenAI's and Anthropic's protocols.

Owns the conversion of an agent's calls to rows of tokens: the call that all protocols share (`agent_call`), their
formats (`openai_wire`, `responses_wire`, `anthropic_wire`), the conversations that the calls form
(`conversation_tree`), and the server (`episode_endpoint`). Promises that sampled tokens are preserved exactly, with
their log-probabilities and policy versions, however the agent branches or shortens its conversations. Must not know
tasks, rewards or how servers are chosen.
"""
