-- A permit or a place in the queue, for each id in turn.
--
-- ARGV    1 capacity
--         2 wait       1 or 0
--         3 terms      "heartbeat ttl label" (ttl "-": none)
--         4 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "queued", length, 0, 0 | "full", 0, 0, 0
local wait, terms, ids = ARGV[first + 1] == '1', terms_of(ARGV[first + 2]), first + 3
if declare(ARGV[first]) then grant() end
local scores = held > 0 and call('ZMSCORE', MAIN, unpack(ARGV, ids, last)) or {}
local places = queued > 0 and call('ZMSCORE', WAITING, unpack(ARGV, ids, last)) or {}

-- Two waiters never share a score. A tail that is more than a second ahead is another program's clock.
local function next_place()
  if place then
    place = place + 1
  else
    -- Only to fail here, before anything is written, should it be of another type.
    call('ZCARD', ALIVE)
    local tail = call('ZRANGE', WAITING, -1, -1, 'WITHSCORES')[2]
    place = NOW
    if tail and micros(tail) < NOW + 1000000 then place = math.max(NOW, micros(tail) + 1) end
  end
  return place
end

for i = 1, last - ids + 1 do
  local id = ARGV[ids + i - 1]
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
    local score = stamp(next_place())
    waiting, alive = waiting or {}, alive or {}
    local n, k, m = #waiting, #alive, #infos
    waiting[n + 1], waiting[n + 2] = score, id
    alive[k + 1], alive[k + 2] = terms.renew_by, id
    infos[m + 1], infos[m + 2] = id, '-' .. info_of(terms)
    answer('queued', queued)
  else
    answer('full')
  end
end
