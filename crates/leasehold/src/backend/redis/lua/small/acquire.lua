-- Grants ordinary permits where nobody waits, the name has no limits but its capacity, and there is room for all ids.
-- Expired holders do not matter then: to remove them could only make more room. In every other case this script changes
-- nothing, and the machine (`machine.lua`, which describes the keys) serves the command.
--
-- KEYS    1 main
--         2 ttl
--         3 max
--         4 waiting
--         5 fence
--         6 info
--         7 limits
-- ARGV    1 capacity   the newest declaration of the sender; 0 if it has declared none
--         2 declares   1 if this declaration is new; 0 if it counts only where no capacity is known
--         3 heartbeat  in microseconds
--         4 ttl        in microseconds; "-": none
--         5 label
--         6 ids        from here on
-- Result  two: "room" or "full" from now on, and the fence of the first id. The next ids have the next fences. False if
--         nothing was done
local call, try, KEYS, ARGV = redis.call, redis.pcall, KEYS, ARGV
local main, ttls, info = KEYS[1], KEYS[2], KEYS[6]
local new, held = #ARGV - 5, 0

-- The number of existing keys tells which of them exist.
local there = call('EXISTS', main, ttls, KEYS[4], KEYS[7])
if there > 0 then
  held = try('ZCARD', main)
  local limited = there > 1 and try('ZCARD', ttls) or 0
  -- Either every holder has a TTL or none has. Otherwise the TTL of a holder that another program has removed may be left.
  if type(held) ~= 'number' or limited ~= (ARGV[4] ~= '-' and held or 0) then return false end
  if there ~= math.min(held, 1) + math.min(limited, 1) then return false end
end

local texts = call('MGET', KEYS[3], KEYS[5])
local capacity, fence = texts[1], tonumber(texts[2] or 0)
local declares = capacity ~= ARGV[1] and (ARGV[2] == '1' or not capacity)
if declares then capacity = ARGV[1] end
local units = tonumber(capacity)
if not units or units < 1 or units > 4294967295 or units % 1 ~= 0 or held + new > units then return false end
-- A Lua number is not exact from 2^53 on, and a value that is not a number cannot be counted up.
if not fence or fence < 0 or not (fence < 9007199254740000) or fence % 1 ~= 0 then return false end
-- A key of another type has no text either. Holders without a fence are those of another program.
if not texts[1] and call('EXISTS', KEYS[3]) == 1 then return false end
if not texts[2] and (there > 0 or call('EXISTS', KEYS[5]) == 1) then return false end

local time = call('TIME')
local now, heartbeat, ttl = time[1] * 1000000 + time[2], ARGV[3], tonumber(ARGV[4])
local ends = now + heartbeat
local renew_by = string.format('%d.%06d', ends / 1000000, ends % 1000000)
-- See TABLE_FROM in the machine.
local is_large = held + new >= 24
local record = string.format(is_large and ' %048d %s %s %s' or ' %d %s %s %s', now, heartbeat, ARGV[4], ARGV[5])
fence = math.max(fence + 1, now)

-- Adds all ids, or none if one of them holds already. If a key has another type, the earlier ones are restored.
local added, recorded
if new == 1 then
  added = try('ZADD', main, 'NX', renew_by, ARGV[6]) == 1
  recorded = added and try('HSET', info, ARGV[6], string.format('%d', fence) .. record)
else
  local members, infos = {}, {}
  for i = 1, new do
    members[2 * i - 1], members[2 * i] = renew_by, ARGV[i + 5]
    infos[2 * i - 1], infos[2 * i] = ARGV[i + 5], string.format('%d', fence + i - 1) .. record
  end
  for _, score in ipairs(held > 0 and call('ZMSCORE', main, unpack(ARGV, 6)) or {}) do
    if score then return false end
  end
  added = try('ZADD', main, 'NX', unpack(members)) == new
  recorded = added and try('HSET', info, unpack(infos))
end
if not added then return false end
local limited = true
if ttl and type(recorded) == 'number' then
  local deadlines = {}
  ends = now + ttl
  local hold_until = string.format('%d.%06d', ends / 1000000, ends % 1000000)
  for i = 1, new do deadlines[2 * i - 1], deadlines[2 * i] = hold_until, ARGV[i + 5] end
  limited = type(try('ZADD', ttls, unpack(deadlines))) == 'number'
end
if type(recorded) ~= 'number' or not limited then
  call('ZREM', main, unpack(ARGV, 6))
  if type(recorded) == 'number' then call('HDEL', info, unpack(ARGV, 6)) end
  return false
end

if is_large and held < 24 then
  local long = string.rep('-', 65)
  call('ZADD', main, 0, long)
  call('ZREM', main, long)
end
call('SET', KEYS[5], string.format('%d', fence + new - 1))
if declares then
  call('SET', KEYS[3], capacity)
elseif not texts[2] then
  -- Another program may have let the capacity expire.
  call('PERSIST', KEYS[3])
end
-- The expiry of a key only grows. To save calls, it is set only if it is more than five seconds short.
local wanted = math.ceil(heartbeat / 1000) + 10000
if held == 0 then
  call('PEXPIRE', main, wanted)
  call('PEXPIRE', info, wanted)
else
  if call('PTTL', main) < wanted - 5000 then call('PEXPIRE', main, wanted) end
  if call('PTTL', info) < wanted - 5000 then call('PEXPIRE', info, wanted) end
end
if ttl then
  wanted = math.ceil(ttl / 1000) + 10000
  if call('PTTL', ttls) < wanted - 5000 then call('PEXPIRE', ttls, wanted) end
end
return { held + new < units and 'room' or 'full', fence }
