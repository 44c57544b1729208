-- The fast path: serves the common cases with few calls. It comes before the functions that the other cases need,
-- because defining a function costs time. It serves one command after the other, as long as each acquires a free lock,
-- or releases a lock that its client holds and nobody waits for. At the first other command it stops, and leaves
-- nothing changed for it. The rest of the script serves that command and all that follow.
--
-- `acquire.lua` and `release.lua` describe KEYS, ARGV and results, and `prelude.lua` describes the stored values.
local call, try = redis.call, redis.pcall
local IS_LAYOUT_2 = ARGV[4] == 'syncguard-2'
local DIGITS = IS_LAYOUT_2 and 15 or 19
local FENCE = '%0' .. DIGITS .. 'd'
-- From here on, a fence has more digits than its layout, or a Lua number is not exact.
local FENCE_END = IS_LAYOUT_2 and 1000000000000000 or 9007199254740992
local CLUSTER = ARGV[5] ~= ''
local results, at, keys, last = {}, 6, 0, #ARGV
-- The number of keys before those that follow the index. The index is the first key, or left out.
local beside = CLUSTER and keys or keys + 1

local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local NOW

while at <= last do
  local command, id, result = ARGV[at], ARGV[at + 1], nil
  if command == 'acquire' then
    local lock, ttl = KEYS[beside + 1], ARGV[at + 2]
    local expected = ARGV[at + 6]
    if ARGV[at + 4] == 'always' or expected == '-' then break end
    NOW = NOW or now()
    -- Formatted once, as text: Redis and Lua would format the number as a fraction, which takes several times as long.
    local ends = string.format('%d', NOW + ttl)
    local head = '{"lockId":"' .. id .. '","expiresAtMs":' .. ends .. ',"acquiredAtMs":' .. string.format('%d', NOW)
      .. ',"key":' .. ARGV[at + 3] .. ',"fence":"'
    local tail = '"' .. ARGV[at + 5] .. '}'
    -- The record is written first, with the fence that the client expects, and then the fence is counted. So no call is
    -- needed to check whether the lock is free, and nothing is counted if it is not.
    result = try('SET', lock, head .. expected .. tail, 'NX', 'PXAT', ends)
    if not result or result.err then break end
    local counted = redis.pcall('INCR', KEYS[beside + 2])
    -- Undo the acquire if the counter cannot be incremented, or if this is its first count, not a valid count, or too
    -- large.
    if type(counted) == 'table' or counted < 2 or counted >= FENCE_END then
      call('DEL', lock)
      if type(counted) == 'number' then call('DECR', KEYS[beside + 2]) end
      break
    end
    local fence = string.format(FENCE, counted)
    if fence ~= expected then result = try('SET', lock, head .. fence .. tail, 'PXAT', ends) end
    if not result.err and not CLUSTER then
      local leads_to = IS_LAYOUT_2 and lock or string.sub(lock, #ARGV[1] + 1)
      result = try('SET', KEYS[keys + 1], leads_to, 'PXAT', ends)
    end
    if not result.err then result = { 1, fence, tonumber(ends), tonumber(ttl) } end
    keys, at = beside + 4, at + 7
  elseif command == 'release_held' then
    -- The client knows that its lease has not ended, so the clock is not read: a record that exists is live.
    local lock = KEYS[beside + 1]
    -- Accept only a record of this id, in the form that our acquire writes: an extension may change the order of the
    -- fields.
    local owned = '{"lockId":"' .. id .. '",'
    if try('GETRANGE', lock, 0, #owned - 1) ~= owned then break end
    if try('SCARD', KEYS[beside + 2]) ~= 0 then break end
    result = try('DEL', lock, KEYS[keys + 1])
    if type(result) == 'number' then result = 1 end
    keys, at = beside + 2, at + 2
  else
    break
  end
  results[#results + 1] = result
  beside = CLUSTER and keys or keys + 1
end
if at > last then return results end

