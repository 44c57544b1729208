-- The common cases, with few calls and before the functions that the others need: a script pays for every function that
-- it defines. This serves one command after the other, as long as each acquires a lock that is free, or releases a lock
-- that its client holds and nobody waits for. The rest of the script serves the first command that is another, and all
-- that follow; for these nothing has been changed.
--
-- `acquire.lua` and `release.lua` say what the KEYS, ARGV and results are, and `prelude.lua` what is stored.
local call, try = redis.call, redis.pcall
local IS_LAYOUT_2 = ARGV[4] == 'syncguard-2'
local FENCE = IS_LAYOUT_2 and '%015d' or '%019d'
local results, at, keys, last = {}, 5, 0, #ARGV

local function now()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local NOW

while at <= last do
  local command, id, result = ARGV[at], ARGV[at + 1], nil
  if command == 'acquire' then
    local lock, ttl = KEYS[keys + 1], ARGV[at + 2]
    local expected = ARGV[at + 6]
    if ARGV[at + 4] == 'always' or expected == '-' then break end
    NOW = NOW or now()
    -- As text, and once: Redis and Lua spell a number as a fraction, which takes several times as long.
    local ends = string.format('%d', NOW + ttl)
    local head = '{"lockId":"' .. id .. '","expiresAtMs":' .. ends .. ',"acquiredAtMs":' .. string.format('%d', NOW)
      .. ',"key":' .. ARGV[at + 3] .. ',"fence":"'
    local tail = '"' .. ARGV[at + 5] .. '}'
    -- The record is written before the fence is counted, with the fence that the client expects: so no question is asked
    -- whether the lock is free, and nothing is counted if it is not.
    result = try('SET', lock, head .. expected .. tail, 'NX', 'PXAT', ends)
    if not result or result.err then break end
    local counted = redis.pcall('INCR', KEYS[keys + 3])
    -- What cannot be counted, the first count, one that is no count, and one that a Lua number cannot hold.
    if type(counted) == 'table' or counted < 2 or counted >= 9007199254740992 then
      call('DEL', lock)
      if type(counted) == 'number' then call('DECR', KEYS[keys + 3]) end
      break
    end
    local fence = string.format(FENCE, counted)
    if fence ~= expected then result = try('SET', lock, head .. fence .. tail, 'PXAT', ends) end
    if not result.err then
      local leads_to = IS_LAYOUT_2 and lock or string.sub(lock, #ARGV[1] + 1)
      result = try('SET', KEYS[keys + 2], leads_to, 'PXAT', ends)
    end
    if not result.err then result = { 1, fence, tonumber(ends), tonumber(ttl) } end
    keys, at = keys + 4, at + 7
  elseif command == 'release_held' then
    -- The client knows that its lease has not ended, so the clock is not asked: a record that is there is live.
    local lock = KEYS[keys + 2]
    local record = try('GET', lock)
    -- Only a record of this id, and as an acquire of ours writes it: whoever extends it may change the order.
    local owned = '{"lockId":"' .. id .. '",'
    if type(record) ~= 'string' or string.sub(record, 1, #owned) ~= owned then break end
    if try('SCARD', KEYS[keys + 3]) ~= 0 then break end
    result = try('DEL', lock, KEYS[keys + 1])
    if type(result) == 'number' then result = 1 end
    keys, at = keys + 3, at + 2
  else
    break
  end
  results[#results + 1] = result
end
if at > last then return results end

