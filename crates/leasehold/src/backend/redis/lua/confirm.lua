-- Woken waiters claim their permits.
--
-- ARGV    6 terms      "heartbeat ttl" (ttl "-": none)
--         7 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "waiting", 0, 0, 0 | "gone", 0, 0, 0
expire()
grant()
for at = 7, #ARGV do
  local id = ARGV[at]
  if holding[id] then
    answer('held', hold_again(id, terms_of(ARGV[6])))
  elseif call('ZSCORE', MAIN, id) then
    local info = parse(call('HGET', INFO, id))
    local label = info.text and string.match(info.text, '^%S+ %S+ ?(.*)$') or ''
    answer('held', confirm(id, info, call('ZSCORE', TTL, id), terms_of(ARGV[6] .. ' ' .. label)))
  elseif call('ZSCORE', WAITING, id) then
    answer('waiting')
  else
    forget_notification(id)
    answer('gone')
  end
end
return finish()
