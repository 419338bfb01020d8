"""What runs inside Redis, each script one atomic step.

Owns the layout of a topic in Redis and its accounting:

    rollcall:<topic>            the stream; an entry has `d`, its bytes, and `e`, bytes published up to its end
    rollcall:<topic>:meta       hash: `published` and `read`, bytes since ever; `held`, bytes not acknowledged;
                                `rejected`, a count; `reader`, the name of the topic's reader
    rollcall:<topic>:rejected   the latest entries set aside
    rollcall:writer:<id>        last step of one writer, so that a step whose answer was lost is not done twice
    rollcall:state:<attempt>    hash: the values of an attempt

Unread bytes are `published − read`, because a reader reads in order. Every script writes all of its changes or none, in
memory and in the append-only file (Redis logs a script's effects as one transaction).
"""

_ACKNOWLEDGE = """
local function acknowledge(stream, meta, first, last)
  local count, freed = 0, 0
  for i = first, last, 2 do
    if redis.call('XDEL', stream, ARGV[i]) == 1 then
      count, freed = count + 1, freed + tonumber(ARGV[i + 1])
    end
  end
  if freed > 0 then redis.call('HINCRBY', meta, 'held', -freed) end
  return count
end
"""

ACKNOWLEDGE = _ACKNOWLEDGE + "acknowledge(KEYS[1], KEYS[2], 1, #ARGV)"
"""KEYS stream, meta. ARGV: id and size of each entry. Counts an entry only if it was still there."""

PUBLISH = (
    _ACKNOWLEDGE
    + """
local done = redis.call('GET', KEYS[3])
if done then
  local step, accepted = string.match(done, '(%d+) (%d+)')
  if step == ARGV[2] then return tonumber(accepted) end
end
local published = tonumber(redis.call('HGET', KEYS[2], 'published') or '0')
local room = tonumber(ARGV[1]) - published + tonumber(redis.call('HGET', KEYS[2], 'read') or '0')
local first, added, accepted = 4 + ARGV[3], 0, 0
for i = first, #ARGV do
  local size = #ARGV[i]
  if added + size > room then break end
  added = added + size
  redis.call('XADD', KEYS[1], '*', 'd', ARGV[i], 'e', published + added)
  accepted = accepted + 1
end
if accepted > 0 then
  redis.call('HINCRBY', KEYS[2], 'published', added)
  redis.call('HINCRBY', KEYS[2], 'held', added)
end
if first + accepted > #ARGV then acknowledge(KEYS[4], KEYS[5], 4, first - 1) end
redis.call('SET', KEYS[3], ARGV[2] .. ' ' .. accepted, 'EX', 3600)
return accepted
"""
)
"""KEYS stream, meta, writer, stream and meta to acknowledge. ARGV: budget, the writer's step, how many arguments name
acknowledged entries, these (id, size, …), payloads. Returns how many payloads fitted."""

MARK_READ = """
local published = tonumber(redis.call('HGET', KEYS[1], 'published') or '0')
local read = tonumber(redis.call('HGET', KEYS[1], 'read') or '0')
local now = math.min(tonumber(ARGV[1]), published)
if now > read then redis.call('HSET', KEYS[1], 'read', now) end
"""
"""KEYS meta. ARGV: `e` of the last entry read. Never goes back; a Redis that lost its last writes bounds it."""

REJECT = (
    _ACKNOWLEDGE
    + """
if acknowledge(KEYS[1], KEYS[2], 1, 2) == 1 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'id', ARGV[1], 'reason', ARGV[3], 'd', ARGV[4])
  redis.call('HINCRBY', KEYS[2], 'rejected', 1)
end
"""
)
"""KEYS stream, meta, rejected. ARGV: id, size, reason, bytes. Keeps the bytes of the latest thousand or so."""
