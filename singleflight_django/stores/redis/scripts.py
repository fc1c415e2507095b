"""What runs on the server: one Lua script for each step that has to be atomic.

A key's entries share the hash tag ``{…}``, so that they live on one node of a cluster:

``<prefix>:{<key>}:lease``   sorted set, owner token -> end of its lease in µs of the server's clock
``<prefix>:{<key>}:fence``   the last fencing token, remembered for 10 ttl
``<prefix>:{<key>}:waiting`` exists while somebody waits for the lease
``<prefix>:{<key>}:free``    list, one element for each release that somebody waited for
``<prefix>:{<key>}:flight``  hash, what is known of the flight under way, or kept of the last one
``<prefix>:{<key>}:apart``   exists while the identity is not coalesced
``<prefix>:{<key>}:<number>`` stream, what became of a flight, while followers may come to read it
"""

from __future__ import annotations

from hashlib import sha1
from typing import NamedTuple


class Script(NamedTuple):
    """A Lua script, the name under which the server caches it, and how a call by that name begins.

    ``call`` takes the number of words of the whole command, and of its keys (fewer than ten).
    """

    source: bytes
    sha: bytes
    call: bytes


def _script(source: str) -> Script:
    text = source.encode()
    sha = sha1(text, usedforsecurity=False).hexdigest().encode()
    return Script(text, sha, b"*%%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$1\r\n%%d\r\n" % sha)


# KEYS: lease, fence, waiting. ARGV: token, ttl in ms, limit, how long the caller means to wait in ms.
# Returns {1, fence}, or {0, ms until the first holder's lease ends}.
# Sent a second time after a lost reply it finds its own token, and grants the lease again.
# Whose lease has ended goes first, even if that is nobody: a server whose memory is full lets a script
# go on that has begun with a write which takes none.
ACQUIRE = _script("""\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ttl = tonumber(ARGV[2])
local lives, remembered = ttl, ttl * 10
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local holders = redis.call('ZCARD', KEYS[1])
if holders > 0 then
  if holders >= tonumber(ARGV[3]) and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
    local wait = tonumber(ARGV[4])
    if wait > 0 and redis.call('PTTL', KEYS[3]) < wait then
      redis.call('SET', KEYS[3], 1, 'PX', wait)
    end
    local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
    return {0, math.ceil((first[2] - now) / 1000)}
  end
  lives = math.max(lives, redis.call('PTTL', KEYS[1]))
  remembered = math.max(remembered, redis.call('PTTL', KEYS[2]))
end
local last = redis.call('GET', KEYS[2])
local fence = last and tonumber(last) >= now and last + 1 or now
redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', remembered)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl * 1000), ARGV[1])
redis.call('PEXPIRE', KEYS[1], lives)
return {1, fence}
""")

# KEYS: lease, fence. ARGV: token, ttl in ms. Returns 1, or 0 if the lease is not the token's any more.
# First the expiry: a server whose memory is full refuses the first write that takes memory, and none
# after one that doesn't.
RENEW = _script("""\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends or tonumber(ends) <= now then return 0 end
local ttl = tonumber(ARGV[2])
redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ttl))
redis.call('PEXPIRE', KEYS[2], math.max(redis.call('PTTL', KEYS[2]), ttl * 10))
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl * 1000), ARGV[1])
return 1
""")

# KEYS: lease, waiting, free. ARGV: token. Returns 1, or 0 if the lease was not the token's any more.
# One waiter is woken for one release; a wake-up that nobody came for is kept for 10 s, not for ever.
RELEASE = _script("""\
local time = redis.call('TIME')
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('RPUSH', KEYS[3], 1)
  redis.call('LTRIM', KEYS[3], -16, -1)
  redis.call('PEXPIRE', KEYS[3], 10000)
end
return tonumber(ends) > time[1] * 1000000 + time[2] and 1 or 0
""")

# Puts what became of a flight where its followers read it, for as long as the longest of them waits.
_LAND = """\
local function us(number) return string.format('%.0f', number) end
local function land(outcome, now, till, status, payload)
  local entry = {'s', status, 'p', payload}
  local added = redis.pcall('XADD', outcome, us(now) .. '-0', unpack(entry))
  -- The clock stepped back: the server numbers the landing after the last one.
  if type(added) == 'table' and added.err then redis.call('XADD', outcome, '*', unpack(entry)) end
  redis.call('PEXPIRE', outcome, math.ceil((till - now) / 1000) + 1000)
end
"""

# KEYS: lease, fence, flight, outcome of the flight that the caller follows, apart.
# ARGV: token, ttl, wait, fingerprint, the followed flight or 0, last landing seen of it, most
# takeovers, life, start of an outcome's key. Times in ms.
# Returns {'landing', id, fields}, {'apart'}, {'busy', flight, ms left, now in us}, {'mismatch'},
# {'kept', payload, ms left} or {'led', flight, fence, takeovers, now}.
#
# All in one step, since between two of them the flight can end: a caller that saw "no result yet" and
# then wins the lease would do the work a second time.
JOIN = _script(
    _LAND
    + """\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local token, ttl, wait, print = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]

if ARGV[5] ~= '0' then
  local landed = redis.call('XREAD', 'COUNT', 1, 'STREAMS', KEYS[4], ARGV[6])
  if landed then return {'landing', landed[1][2][1][1], landed[1][2][1][2]} end
end
if redis.call('EXISTS', KEYS[5]) == 1 then return {'apart'} end

local known = redis.call('HMGET', KEYS[3], 'flight', 'print', 'open', 'till', 'takeovers', 'again',
  'kept', 'ends', 'fence')
local flight, open, till = known[1], known[3], tonumber(known[4]) or 0
local takeovers = tonumber(known[5]) or 0
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local holder = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')

if flight and holder[1] == token then return {'led', flight, known[9], takeovers, us(now)} end
if holder[1] then
  -- No flight's lease, or the flight was evicted: whoever comes waits for the lease to end.
  if not flight then return {'busy', '0', math.ceil((holder[2] - now) / 1000), us(now)} end
  if known[2] ~= print then return {'mismatch'} end
  if now + wait * 1000 > till then redis.call('HSET', KEYS[3], 'till', us(now + wait * 1000)) end
  if ARGV[5] == '0' then redis.call('HINCRBY', KEYS[3], 'followers', 1) end
  return {'busy', flight, math.ceil((holder[2] - now) / 1000), us(now)}
end
if not open and known[7] and tonumber(known[8]) > now then
  if known[2] ~= print then return {'mismatch'} end
  return {'kept', known[7], math.ceil((known[8] - now) / 1000)}
end

local taken_over = open and known[2] == print and (ARGV[5] == flight or till > now)
if taken_over then
  if not known[6] then takeovers = takeovers + 1 end
  if takeovers > tonumber(ARGV[7]) then
    land(ARGV[9] .. flight, now, math.max(till, now), 'failed', '')
    redis.call('DEL', KEYS[3])
    if ARGV[5] == flight then
      -- It ends with this very call: whoever waits with the caller has come before that.
      return {'landing', '0-0', {'s', 'failed', 'p', ''}}
    end
    taken_over = false
  end
end

local fence = math.max(now, (tonumber(redis.call('GET', KEYS[2])) or 0) + 1)
redis.call('SET', KEYS[2], us(fence), 'PX', ttl * 10)
redis.call('ZADD', KEYS[1], us(now + ttl * 1000), token)
redis.call('PEXPIRE', KEYS[1], ttl)
if taken_over then
  redis.call('HDEL', KEYS[3], 'again')
  if ARGV[5] == flight then redis.call('HINCRBY', KEYS[3], 'followers', -1) end
  redis.call('HSET', KEYS[3], 'takeovers', takeovers, 'fence', us(fence))
else
  if flight then redis.call('DEL', KEYS[3]) end
  flight, takeovers = us(fence), 0
  redis.call('HSET', KEYS[3], 'flight', flight, 'print', print, 'open', 1, 'takeovers', 0,
    'fence', flight)
end
redis.call('PEXPIRE', KEYS[3], ARGV[8])
return {'led', flight, us(fence), takeovers, us(now)}
"""
)

# KEYS: lease, flight, outcome, apart.
# ARGV: token, status, keep, apart, retry, for how long followers in the leader's own process wait at
# most, or 0 without any; payload. Times in ms.
# Returns the status that followers see, or false if the lease was not the token's any more.
PUBLISH = _script(
    _LAND
    + """\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends or tonumber(ends) <= now then return false end
redis.call('ZREM', KEYS[1], ARGV[1])

local status, keep, apart = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local known = redis.call('HMGET', KEYS[2], 'till', 'failures', 'open')
local till, linger, open = tonumber(known[1]) or 0, tonumber(ARGV[6]), known[3]
local followed = open and (till > now or linger > 0)
if status == 'failed' and followed and (tonumber(known[2]) or 0) < tonumber(ARGV[5]) then
  redis.call('HINCRBY', KEYS[2], 'failures', 1)
  status = 'again'
end
if followed and (status == 'again' or status == 'vacant') then
  if status == 'again' then redis.call('HSET', KEYS[2], 'again', 1) end
  -- Whoever comes next is to go on with this flight: another one would have its tries anew.
  redis.call('HSET', KEYS[2], 'till', us(math.max(till, now + linger * 1000)))
elseif open and status == 'done' and keep > 0 then
  redis.call('HDEL', KEYS[2], 'open')
  redis.call('HSET', KEYS[2], 'kept', ARGV[7], 'ends', us(now + keep * 1000))
  redis.call('PEXPIRE', KEYS[2], keep)
else
  redis.call('DEL', KEYS[2])
end
if apart > 0 then redis.call('SET', KEYS[4], 1, 'PX', apart) end
if till > now then land(KEYS[3], now, till, status, ARGV[7]) end
return status
"""
)

# KEYS: flight. Drops what is kept, never a flight under way. Returns 1 if there was something.
FORGET = _script("""\
if redis.call('HEXISTS', KEYS[1], 'open') == 1 then return 0 end
return redis.call('DEL', KEYS[1])
""")

# KEYS: flight. Returns 1 if a follower of the flight may still be waiting.
FOLLOWED = _script("""\
local time = redis.call('TIME')
local till = tonumber(redis.call('HGET', KEYS[1], 'till')) or 0
return till > time[1] * 1000000 + time[2] and 1 or 0
""")

# KEYS: any entry. Returns the clock of its node in us.
NOW = _script("""\
local time = redis.call('TIME')
return string.format('%.0f', time[1] * 1000000 + time[2])
""")

# KEYS: any entry. Returns 1: whether scripts may be run at all.
NOTHING = _script("return 1")

# KEYS: lease, fence, flight. Changes nothing.
# Returns {now in us, {token, end in us, ...}, fence, flight, how many have joined it}; of what there
# isn't, false.
HOLDERS = _script("""\
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local held = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf', 'WITHSCORES')
local known = redis.call('HMGET', KEYS[3], 'open', 'flight', 'fence', 'followers', 'till')
if not known[1] then return {now, held, redis.call('GET', KEYS[2]), false, 0} end
local followed = (tonumber(known[5]) or 0) > tonumber(now)
return {now, held, known[3], known[2], followed and math.max(0, tonumber(known[4]) or 1) or 0}
""")
