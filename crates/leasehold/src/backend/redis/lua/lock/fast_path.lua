-- The fast path: acquires a free lock, or releases a lock that its client holds and nobody waits for, with few calls. In
-- every other case it changes nothing, and the rest of the script serves the command. It comes before the functions that
-- the other cases need, because defining a function costs time.
--
-- `acquire.lua` and `release.lua` describe KEYS, ARGV and results, `apply.lua` those of all commands, and `prelude.lua` the
-- stored values.
local call, try = redis.call, redis.pcall
local IS_LAYOUT_2 = ARGV[4] == 'syncguard-2'
local DIGITS = IS_LAYOUT_2 and 15 or 19
local CLUSTER = ARGV[5] ~= ''
local command, id = ARGV[6], ARGV[7]
-- The number of keys before those that follow the index. The index is the first key, or left out.
local beside = CLUSTER and 0 or 1

local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local NOW

if command == 'acquire' and ARGV[10] ~= 'always' and ARGV[12] ~= '-' then
  local lock, counter, ttl, expected = KEYS[beside + 1], KEYS[beside + 2], ARGV[8], ARGV[12]
  NOW = now()
  -- Formatted once, as text: Redis and Lua would format the number as a fraction, which takes several times as long.
  local ends = string.format('%d', NOW + ttl)
  local head = '{"lockId":"' .. id .. '","expiresAtMs":' .. ends .. ',"acquiredAtMs":' .. string.format('%d', NOW)
    .. ',"key":' .. ARGV[9] .. ',"fence":"'
  local tail = '"' .. ARGV[11] .. '}'
  -- The record is written first, with the fence that the client expects, and then the fence is counted. So no call is
  -- needed to check whether the lock is free, and nothing is counted if it is not.
  local written = try('SET', lock, head .. expected .. tail, 'NX', 'PXAT', ends)
  if written and not written.err then
    local counted = try('INCR', counter)
    -- From here on, a fence has more digits than its layout, or a Lua number is not exact.
    local end_of_fences = IS_LAYOUT_2 and 1000000000000000 or 9007199254740992
    if type(counted) == 'number' and counted >= 2 and counted < end_of_fences then
      local fence = string.format('%0' .. DIGITS .. 'd', counted)
      if fence ~= expected then written = try('SET', lock, head .. fence .. tail, 'PXAT', ends) end
      if not written.err and not CLUSTER then
        local leads_to = IS_LAYOUT_2 and lock or string.sub(lock, #ARGV[1] + 1)
        written = try('SET', KEYS[1], leads_to, 'PXAT', ends)
      end
      if written.err then return written end
      return { 1, fence, tonumber(ends), tonumber(ttl) }
    end
    -- The counter cannot be incremented, or this is its first count, or not a valid one: undo the acquire.
    call('DEL', lock)
    if type(counted) == 'number' then call('DECR', counter) end
  end
elseif command == 'release_held' then
  -- The client knows that its lease has not ended, so the clock is not read: a record that exists is live. Accept only a
  -- record of this id, in the form that our acquire writes: an extension may change the order of the fields.
  local lock = KEYS[beside + 1]
  local owned = '{"lockId":"' .. id .. '",'
  if try('GETRANGE', lock, 0, #owned - 1) == owned and try('SCARD', KEYS[beside + 2]) == 0 then
    local removed = try('DEL', lock, KEYS[1])
    return type(removed) == 'number' and 1 or removed
  end
  -- The client believes that it holds the lock, but this is not the common case. So the id decides.
  command = 'release'
end

