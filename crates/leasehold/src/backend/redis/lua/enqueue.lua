-- A permit or a place in the queue, for each id in turn.
--
-- ARGV    6 capacity; then five for each id: id, wait (1 or 0), heartbeat, ttl ("-": none), label
-- Result  four for each id: "held", slot number, fence, valid_for | "queued", length, 0, 0 | "full", 0, 0, 0
local declared = tonumber(ARGV[6])
local ids = {}
for at = 7, #ARGV, 5 do ids[#ids + 1] = ARGV[at] end

-- First of all: if that makes room, it belongs to those who were here before.
if read_capacity() ~= declared then
  capacity = declared
  writes.max = ARGV[6]
end
expire()
grant()
local scores = held > 0 and redis.call('ZMSCORE', MAIN, unpack(ids)) or {}
local places = queued > 0 and redis.call('ZMSCORE', WAITING, unpack(ids)) or {}

-- Two waiters never share a score. A tail that is more than a second ahead is another program's clock.
local place
local function next_place()
  if place then
    place = place + 1
  else
    redis.call('ZCARD', ALIVE)
    local tail = redis.call('ZRANGE', WAITING, -1, -1, 'WITHSCORES')[2]
    place = NOW
    if tail and micros(tail) < NOW + 1000000 then place = math.max(NOW, micros(tail) + 1) end
  end
  return place
end

for i, id in ipairs(ids) do
  local at = 7 + (i - 1) * 5
  local wait, heartbeat, ttl, label = ARGV[at + 1], tonumber(ARGV[at + 2]), span(ARGV[at + 3]), ARGV[at + 4]
  local terms = ' ' .. SINCE .. ' ' .. ARGV[at + 2] .. ' ' .. ARGV[at + 3] .. ' ' .. label
  if holding[id] then
    answer('held', hold_again(id, heartbeat))
  elseif scores[i] then
    local info = redis.call('HGET', INFO, id)
    local hold_until = redis.call('ZSCORE', TTL, id)
    answer('held', confirm(id, parse(info), hold_until, heartbeat, ttl, terms))
  elseif places[i] then
    answer('queued', queued)
  elseif held < capacity then
    local slot, fence, valid_for = hold(id, heartbeat, ttl, terms)
    holding[id] = { fence = fence, ttl = ttl }
    answer('held', slot, fence, valid_for)
  elseif wait == '1' then
    queued = queued + 1
    add(writes.waiting, stamp(next_place()), id)
    add(writes.alive, stamp_in(heartbeat), id)
    add(writes.info, id, describe(nil, terms))
    answer('queued', queued)
  else
    answer('full')
  end
end
return finish()
