-- The lease pool: the code that all its scripts share. `machine/pool.rs` has the argument.
--
-- KEYS    1 ZSET instance id -> server seconds of its last acquire or renewal; 2 (not for count) the instance's holder key
-- ARGV    1 TTL in milliseconds; from 2 on as each script says
-- Result  success (1 or 0), status, current_count, expired_count; of count only the last two
local call = redis.call
local MEMBERS, HOLDER, TTL = KEYS[1], KEYS[2], tonumber(ARGV[1])

local function now()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

local NOW = now()

-- Scores have microseconds; `tostring` and `..` would keep too few digits.
local function stamp(micros)
  return string.format('%d.%06d', math.floor(micros / 1000000), micros % 1000000)
end

-- Every call first removes the members that were silent for the caller's TTL. All clients should use the same TTL.
local expired = call('ZREMRANGEBYSCORE', MEMBERS, '-inf', stamp(NOW - TTL * 1000))

local function touch(instance)
  call('SET', HOLDER, '1', 'PX', ARGV[1])
  call('ZADD', MEMBERS, stamp(NOW), instance)
end

local function answer(success, status)
  return { success, status, call('ZCARD', MEMBERS), expired }
end
