"""What runs on the server: one Lua script for each step that has to be atomic.

A key's entries share the hash tag ``{…}``, so that they live on one node of a cluster:

``<prefix>:{<key>}:lease``   sorted set, owner token -> end of its lease in µs of the server's clock
``<prefix>:{<key>}:fence``   the last fencing token, remembered for 10 ttl
``<prefix>:{<key>}:waiting`` exists while somebody waits for the lease
``<prefix>:{<key>}:free``    list, one element for each release that somebody waited for
"""

from __future__ import annotations

from hashlib import sha1
from typing import NamedTuple


class Script(NamedTuple):
    """A Lua script and the name under which the server caches it."""

    source: bytes
    sha: bytes


def _script(source: str) -> Script:
    text = source.encode()
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


# KEYS: lease, fence, waiting. ARGV: token, ttl in ms, limit, how long the caller means to wait in ms.
# Returns {1, fence}, or {0, ms until the first holder's lease ends}.
# Sent a second time after a lost reply it finds its own token, and grants the lease again.
ACQUIRE = _script("""\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  local wait = tonumber(ARGV[4])
  if wait > 0 and redis.call('PTTL', KEYS[3]) < wait then
    redis.call('SET', KEYS[3], 1, 'PX', wait)
  end
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return {0, math.ceil((first[2] - now) / 1000)}
end
local ttl = tonumber(ARGV[2])
local fence = math.max(now, (tonumber(redis.call('GET', KEYS[2])) or 0) + 1)
redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ttl * 10)
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl * 1000), ARGV[1])
if redis.call('PTTL', KEYS[1]) < ttl then redis.call('PEXPIRE', KEYS[1], ttl) end
return {1, fence}
""")

# KEYS: lease. ARGV: token, ttl in ms. Returns 1, or 0 if the lease is not the token's any more.
RENEW = _script("""\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends or tonumber(ends) <= now then return 0 end
local ttl = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl * 1000), ARGV[1])
if redis.call('PTTL', KEYS[1]) < ttl then redis.call('PEXPIRE', KEYS[1], ttl) end
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
