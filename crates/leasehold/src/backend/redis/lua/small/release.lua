-- Removes holders of ordinary permits. If nobody waits for their permits, that is all: expired holders do not matter. If
-- somebody waits, it grants the free units to the first waiters, under the following conditions: the name has no limits
-- but its capacity, no permit has a TTL, no other program takes part, nothing has expired, and the waiters want ordinary
-- permits. Either all of these waiters belong to the sender, or there is only one, whose client listens. In every other
-- case this script changes nothing, and the machine (`machine.lua`, which describes the keys) serves the command.
--
-- KEYS    1 waiting
--         2 info
--         3 main
--         4 ttl       only if the permits have a TTL, or together with the keys below
--         and only if somebody may wait
--         5 max
--         6 alive
--         7 fence
--         8 limits
--         9 foreign
-- ARGV    only if somebody may wait
--         1 namespace
--         2 client          the sender
--         3 confirm_within  in microseconds
--         4 channel         the end of the wake-up channels
--         5 name
--         and always
--         6 ids             from here on
-- Result  "room" if nobody waited; else "full" if nobody waits from now on, or "queue"; and for each id 1 if it held, else
--         0. If somebody waited, these follow: the delay until the next expiry (-1: nobody waits), and for each waiter of
--         the sender that was granted a permit its id, 0, its fence and valid_for. False if nothing was done
local call, try, KEYS, ARGV = redis.call, redis.pcall, KEYS, ARGV
local waiting, info, main, ttls = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local ids = KEYS[5] and 6 or 1

if call('EXISTS', waiting) == 0 then
  local result = { 'room' }
  for i = ids, #ARGV do
    local removed = try('ZREM', main, ARGV[i])
    if type(removed) ~= 'number' then return false end
    result[i - ids + 2] = removed
  end
  -- If another program uses one of these keys, it has nothing of ours.
  try('HDEL', info, unpack(ARGV, ids))
  if ttls then try('ZREM', ttls, unpack(ARGV, ids)) end
  return result
end
if ids == 1 or call('EXISTS', ttls, KEYS[8], KEYS[9]) > 0 then return false end

local alive, namespace, sender, name = KEYS[6], ARGV[1], ARGV[2] .. '-', ARGV[5]
local held, queued, infos = try('ZCARD', main), try('ZCARD', waiting), try('HLEN', info)
if type(held) ~= 'number' or type(queued) ~= 'number' or infos ~= held + queued then return false end
local texts = call('MGET', KEYS[5], KEYS[7])
local capacity, fence = tonumber(texts[1] or nil), tonumber(texts[2] or nil)
if not capacity or capacity < 1 or capacity > 4294967295 or capacity % 1 ~= 0 then return false end
if not fence or fence < 0 or not (fence < 9007199254740000) or fence % 1 ~= 0 then return false end

local result, released, ending = { 'queue' }, #ARGV - ids + 1, {}
local scores, removed = call('ZMSCORE', main, unpack(ARGV, ids)), 0
for i = 1, released do
  result[i + 1] = scores[i] and 1 or 0
  if scores[i] then removed, ending[ARGV[ids + i - 1]] = removed + 1, true end
end
local grants = math.min(capacity - held + removed, queued)
-- From 24 holders on, the machine stores them as a table.
if grants < 0 or grants > 100 or held < 24 and held - removed + grants >= 24 then return false end

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local function micros(score) return math.min(math.floor(score * 1000000 + 0.5), now + 3155760000000000) end
local function stamp(at) return string.format('%d.%06d', at / 1000000, at % 1000000) end

-- The holders that end first, among them one that stays, and the end of that one.
local first, expiry = call('ZRANGE', main, 0, removed, 'WITHSCORES'), math.huge
if #first > 0 and micros(first[2]) <= now then return false end
for i = 1, #first, 2 do
  if not ending[first[i]] then
    expiry = micros(first[i + 1])
    break
  end
end
local dead = try('ZCOUNT', alive, '-inf', stamp(now))
if dead ~= 0 then return false end

-- The waiters to be granted a permit, and the one after them.
local heads = call('ZRANGE', waiting, 0, grants)
local next_head = table.remove(heads, grants + 1)
local members, records, granted, channel, message = {}, {}, {}, nil, nil
local shape = held + queued - removed < 24 and '%d %d %s' or '%d %048d %s'
local longest, last = 0, fence
for i, text in ipairs(grants > 0 and call('HMGET', info, unpack(heads)) or {}) do
  local id = heads[i]
  local terms, heartbeat = string.match(text or '', '^%- %d+ ((%d+) %- .*)$')
  if not terms or not string.find(id, '^%w+%-%d+$') then return false end
  heartbeat = tonumber(heartbeat)
  last = math.max(last + 1, now)
  local ends = now + heartbeat
  if string.sub(id, 1, 12) == sender then
    granted[#granted + 1], granted[#granted + 2] = id, 0
    granted[#granted + 1], granted[#granted + 2] = last, heartbeat
  elseif grants > 1 or string.sub(id, 12, 12) ~= '-' then
    return false
  else
    local claim = math.min(tonumber(ARGV[3]), heartbeat)
    ends = now + claim
    channel = namespace .. ':wake:' .. string.sub(id, 1, 11) .. ARGV[4]
    message = string.format('%s %d %d 0 %d %s', id, now, last, claim, name)
    -- Not published unless the client listens: `publish` in the machine says why.
    if try('PUBSUB', ARGV[4] ~= '' and 'SHARDNUMSUB' or 'NUMSUB', channel)[2] == 0 then return false end
  end
  longest, expiry = math.max(longest, heartbeat), math.min(expiry, ends)
  members[2 * i - 1], members[2 * i] = stamp(ends), id
  records[2 * i - 1], records[2 * i] = id, string.format(shape, last, now, terms)
end
local next_alive = next_head and call('ZSCORE', alive, next_head)
if next_alive then expiry = math.min(expiry, micros(next_alive)) end

if channel then
  local receivers = try(ARGV[4] ~= '' and 'SPUBLISH' or 'PUBLISH', channel, message)
  if type(receivers) ~= 'number' or receivers == 0 then return false end
end
call('HDEL', info, unpack(ARGV, ids))
if removed > 0 then call('ZREM', main, unpack(ARGV, ids)) end
if grants > 0 then
  call('HSET', info, unpack(records))
  call('ZADD', main, unpack(members))
  call('ZREM', waiting, unpack(heads))
  call('ZREM', alive, unpack(heads))
  call('SET', KEYS[7], string.format('%d', last))
  local wanted = math.ceil(longest / 1000) + 10000
  if call('PTTL', main) < wanted - 5000 then call('PEXPIRE', main, wanted) end
  if call('PTTL', info) < wanted - 5000 then call('PEXPIRE', info, wanted) end
end
if not next_head then result[1], expiry = 'full', math.huge end
local n = released + 1
result[n + 1] = expiry < math.huge and math.max(expiry - now, 1) or -1
for i = 1, #granted do result[n + 1 + i] = granted[i] end
return result
