-- Woken waiters claim their permits.
--
-- ARGV    from 6 on three for each id: id, heartbeat, ttl ("-": none)
-- Result  four for each id: "held", slot number, fence, valid_for | "waiting", 0, 0, 0 | "gone", 0, 0, 0
local outcomes = {}
expire()
grant()
for at = 6, #ARGV, 3 do
  local id = ARGV[at]
  local heartbeat, ttl = tonumber(ARGV[at + 1]), span(ARGV[at + 2])
  local told = holding[id] and hold_again(id, heartbeat)
  if not told and redis.call('ZSCORE', MAIN, id) then
    local info = parse(redis.call('HGET', INFO, id))
    local hold_until = redis.call('ZSCORE', TTL, id)
    told = confirm(id, info, hold_until and micros(hold_until), heartbeat, ttl, info.label or '')
  end
  if told then
    outcomes[#outcomes + 1] = { 'held', told[1], told[2], told[3] }
  elseif redis.call('ZSCORE', WAITING, id) then
    outcomes[#outcomes + 1] = { 'waiting', 0, 0, 0 }
  else
    outcomes[#outcomes + 1] = { 'gone', 0, 0, 0 }
  end
end
return finish(outcomes)
