-- A permit or a place in the queue, for each id in turn.
--
-- ARGV    6 capacity
--         7 wait       1 or 0
--         8 terms      "heartbeat ttl label" (ttl "-": none)
--         9 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "queued", length, 0, 0 | "full", 0, 0, 0
local declared, wait, terms = tonumber(ARGV[6]), ARGV[7] == '1', terms_of(ARGV[8])

-- First of all: if that makes room, it belongs to those who were here before.
if read_capacity() ~= declared then
  capacity = declared
  max = ARGV[6]
end
expire()
grant()
local scores = held > 0 and call('ZMSCORE', MAIN, unpack(ARGV, 9)) or {}
local places = queued > 0 and call('ZMSCORE', WAITING, unpack(ARGV, 9)) or {}

-- Two waiters never share a score. A tail that is more than a second ahead is another program's clock.
local place
local function next_place()
  if place then
    place = place + 1
  else
    call('ZCARD', ALIVE)
    waiting, alive = {}, {}
    local tail = call('ZRANGE', WAITING, -1, -1, 'WITHSCORES')[2]
    place = NOW
    if tail and micros(tail) < NOW + 1000000 then place = math.max(NOW, micros(tail) + 1) end
  end
  return place
end

for i = 1, #ARGV - 8 do
  local id = ARGV[8 + i]
  if holding[id] then
    answer('held', hold_again(id, terms))
  elseif scores[i] then
    answer('held', confirm(id, parse(call('HGET', INFO, id)), call('ZSCORE', TTL, id), terms))
  elseif places[i] then
    answer('queued', queued)
  elseif held < capacity then
    answer('held', hold(id, terms))
  elseif wait then
    queued = queued + 1
    local score, n, m = stamp(next_place()), #waiting, #infos
    waiting[n + 1], waiting[n + 2] = score, id
    alive[n + 1], alive[n + 2] = terms.renew_by, id
    infos[m + 1], infos[m + 2] = id, '-' .. terms.info
    answer('queued', queued)
  else
    answer('full')
  end
end
return finish()
