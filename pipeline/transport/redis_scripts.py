"""The scripts that run inside Redis, each one atomic step.

Owns the layout of a topic in Redis and its accounting:

    rollcall:<topic>            the stream; an entry has `d`, its bytes, and `e`, bytes published up to its end
    rollcall:<topic>:meta       hash: `published` and `read`, total bytes; `held`, bytes not acknowledged; `rejected`,
                                a count; `reader`, the name of the topic's reader; `opened`, the number of its last
                                opening
    rollcall:<topic>:rejected   the latest rejected entries
    rollcall:writer:<id>        last step of one writer, so that a step whose answer was lost is not done twice
    rollcall:state:<attempt>    hash: the values of an attempt

Unread bytes are `published − read`, because a reader reads in order. The budget bounds `held`. While nothing is unread
one more entry is admitted, because a reader of all entries may need one more before it can acknowledge. Every script
writes all of its changes or none, in memory and in the append-only file (Redis logs a script's effects as one
transaction).

Openings of a topic have growing numbers: microseconds of Redis's clock, or the last number plus one if the clock stands
still. A reader passes its number to every script, and is refused if Redis has a higher one. A Redis that lost its last
writes may have a lower one, or none: it adopts the number that is passed. So the reader that was opened last always
continues, and a replaced reader continues only until the last one has passed its number.
"""

REPLACED = "REPLACED another process reads this topic now; this one was replaced, and stays so: end it"

_GUARD = (
    """
local function last_opening(meta)
  return tonumber(redis.call('HGET', meta, 'opened') or '0')
end
local function replaced(meta, opening)
  local last, own = last_opening(meta), tonumber(opening)
  if last < own then redis.call('HSET', meta, 'opened', opening) end
  return last > own
end
"""
    f"local REPLACED = redis.error_reply('{REPLACED}')\n"
)

OPEN = (
    _GUARD
    + """
local owner, opening = redis.call('HGET', KEYS[1], 'reader'), ARGV[2]
if owner and owner ~= ARGV[1] then return {owner, ''} end
if opening == '' then
  local now = redis.call('TIME')
  opening = string.format('%.0f', math.max(now[1] * 1000000 + now[2], last_opening(KEYS[1]) + 1))
end
if replaced(KEYS[1], opening) then return REPLACED end
redis.call('HSET', KEYS[1], 'reader', ARGV[1])
return {ARGV[1], opening}
"""
)
"""KEYS meta. ARGV: the reader's name, and its opening or nothing. Returns the topic's reader, and the opening.

With an opening in ARGV, a reader reopens the topic after Redis lost its last writes.
"""

_ACKNOWLEDGE = (
    _GUARD
    + """
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
)

ACKNOWLEDGE = (
    _ACKNOWLEDGE
    + """
if replaced(KEYS[2], ARGV[1]) then return REPLACED end
acknowledge(KEYS[1], KEYS[2], 2, #ARGV)
"""
)
"""KEYS stream, meta. ARGV: the opening; id and size of each entry. Counts an entry only if it was still there."""

PUBLISH = (
    _ACKNOWLEDGE
    + """
local done = redis.call('GET', KEYS[3])
if done then
  local step, accepted = string.match(done, '(%d+) (%d+)')
  if step == ARGV[2] then return tonumber(accepted) end
end
if ARGV[3] ~= '' and replaced(KEYS[5], ARGV[3]) then return REPLACED end
local published = tonumber(redis.call('HGET', KEYS[2], 'published') or '0')
local room = tonumber(ARGV[1]) - tonumber(redis.call('HGET', KEYS[2], 'held') or '0')
local waiting = tonumber(redis.call('HGET', KEYS[2], 'read') or '0') == published
local first, added, accepted = 5 + ARGV[4], 0, 0
for i = first, #ARGV do
  local size = #ARGV[i]
  if added + size > room and not (waiting and added == 0) then break end
  added = added + size
  redis.call('XADD', KEYS[1], '*', 'd', ARGV[i], 'e', published + added)
  accepted = accepted + 1
end
if accepted > 0 then
  redis.call('HINCRBY', KEYS[2], 'published', added)
  redis.call('HINCRBY', KEYS[2], 'held', added)
end
if first + accepted > #ARGV then acknowledge(KEYS[4], KEYS[5], 5, first - 1) end
redis.call('SET', KEYS[3], ARGV[2] .. ' ' .. accepted, 'EX', 3600)
return accepted
"""
)
"""KEYS stream, meta, writer, stream and meta to acknowledge. ARGV: budget, the writer's step, the opening of the
acknowledging reader or nothing, the number of arguments that name acknowledged entries, these (id, size, …), payloads.
Returns the number of payloads that fitted."""

MARK_READ = (
    _GUARD
    + """
if replaced(KEYS[1], ARGV[1]) then return REPLACED end
local published = tonumber(redis.call('HGET', KEYS[1], 'published') or '0')
local read = tonumber(redis.call('HGET', KEYS[1], 'read') or '0')
local now = math.min(tonumber(ARGV[2]), published)
if now > read then redis.call('HSET', KEYS[1], 'read', now) end
"""
)
"""KEYS meta. ARGV: the opening; `e` of the last entry read. Monotonic, and bounded in case Redis lost writes."""

REJECT = (
    _ACKNOWLEDGE
    + """
if replaced(KEYS[2], ARGV[1]) then return REPLACED end
if acknowledge(KEYS[1], KEYS[2], 2, 3) == 1 then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'id', ARGV[2], 'reason', ARGV[4], 'd', ARGV[5])
  redis.call('HINCRBY', KEYS[2], 'rejected', 1)
end
"""
)
"""KEYS stream, meta, rejected. ARGV: the opening, id, size, reason, first bytes. Retains about a thousand entries."""
