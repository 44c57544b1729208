-- Woken waiters claim their permits.
--
-- ARGV    from 6 on three for each id: id, heartbeat, ttl ("-": none)
-- Result  four for each id: "held", slot number, fence, valid_for | "waiting", 0, 0, 0 | "gone", 0, 0, 0
expire()
grant()
for at = 6, #ARGV, 3 do
  local id, heartbeat, ttl = ARGV[at], tonumber(ARGV[at + 1]), span(ARGV[at + 2])
  if holding[id] then
    answer('held', hold_again(id, heartbeat))
  elseif redis.call('ZSCORE', MAIN, id) then
    local info = parse(redis.call('HGET', INFO, id))
    local hold_until = redis.call('ZSCORE', TTL, id)
    local terms = describe_terms(heartbeat, ttl, info.label or '')
    answer('held', confirm(id, info, hold_until, heartbeat, ttl, terms))
  elseif redis.call('ZSCORE', WAITING, id) then
    answer('waiting')
  else
    forget_notification(id)
    answer('gone')
  end
end
return finish()
