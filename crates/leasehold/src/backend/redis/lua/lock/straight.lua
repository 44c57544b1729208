-- The common cases, served without a function for each part of the work: a script pays for every function that it
-- defines. An acquire of a lock that is free, and a release of a lock that is held and that nobody waits for, are served
-- one after the other. The first command that is anything else ends this; the rest of the script serves it and all that
-- follow. Nothing has been changed for it then.
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
    -- Whatever is there, a key of another type included, is for the rest of the script.
    if ARGV[at + 4] == 'always' or try('GET', lock) then break end
    NOW = NOW or now()
    local counted = redis.pcall('INCR', KEYS[keys + 3])
    if type(counted) == 'table' then break end
    -- The first count, one that is no count, and one that a Lua number cannot hold.
    if counted < 2 or counted >= 9007199254740992 then
      call('DECR', KEYS[keys + 3])
      break
    end
    local ends, fence = NOW + ttl, string.format(FENCE, counted)
    -- As text, and once: Redis and Lua spell a number as a fraction, which takes several times as long.
    local ends_text = string.format('%d', ends)
    result = try('SET', lock, '{"lockId":"' .. id .. '","expiresAtMs":' .. ends_text .. ',"acquiredAtMs":'
      .. string.format('%d', NOW) .. ',"key":' .. ARGV[at + 3] .. ',"fence":"' .. fence .. '"' .. ARGV[at + 5] .. '}',
      'PXAT', ends_text)
    if not result.err then
      local leads_to = IS_LAYOUT_2 and lock or string.sub(lock, #ARGV[1] + 1)
      result = try('SET', KEYS[keys + 2], leads_to, 'PXAT', ends_text)
    end
    if not result.err then result = { 1, fence, ends, tonumber(ttl) } end
    keys, at = keys + 4, at + 6
  elseif command == 'release' then
    local index = KEYS[keys + 1]
    local lock = try('GET', index)
    if type(lock) ~= 'string' then break end
    if not IS_LAYOUT_2 then lock = ARGV[1] .. lock end
    local record = try('GET', lock)
    if type(record) ~= 'string' then break end
    -- Only a record of this id, and as an acquire of ours writes it: whoever extends it may change the order.
    local owned = '{"lockId":"' .. id .. '","expiresAtMs":'
    if string.sub(record, 1, #owned) ~= owned then break end
    local ends, fence = string.match(record, '^(%d+),"acquiredAtMs":%d+,"key":"[^"\\]*","fence":"(%d+)"', #owned + 1)
    if not ends or #ends ~= 13 or #fence ~= (IS_LAYOUT_2 and 15 or 19) then break end
    NOW = NOW or now()
    if ends + 0 <= NOW - TOLERANCE_MS then break end
    if try('SCARD', ARGV[2] .. ':lock_waiting:' .. lock) ~= 0 then break end
    result = try('DEL', lock, index)
    if type(result) == 'number' then result = 1 end
    keys, at = keys + 1, at + 2
  else
    break
  end
  results[#results + 1] = result
end
if at > last then return results end

