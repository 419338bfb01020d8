"""An OpenAI-compatible endpoint for one episode of an agent.

Owns the way from an agent's calls to rows of tokens: the wire format (`openai_wire`), the conversations that the calls
make (`conversation_tree`), and the server (`episode_endpoint`). Promises that what the policy sampled is kept exactly
as it was, with its log-probabilities and weight versions, however the agent branches or shortens its conversations.
Must not know tasks, rewards or how servers are chosen.
"""
