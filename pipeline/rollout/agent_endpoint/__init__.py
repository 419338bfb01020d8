"""An OpenAI-compatible endpoint for one episode of an agent.

Owns the conversion of an agent's calls to rows of tokens: the wire format (`openai_wire`), the conversations that the
calls form (`conversation_tree`), and the server (`episode_endpoint`). Promises that sampled tokens are preserved
exactly, with their log-probabilities and policy versions, however the agent branches or shortens its conversations.
Must not know tasks, rewards or how servers are chosen.
"""
