-- Woken waiters claim their permits.
--
-- ARGV    1 terms      "heartbeat ttl" (ttl "-": none)
--         2 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "waiting", 0, 0, 0 | "gone", 0, 0, 0
for at = first + 1, last do
  local id = ARGV[at]
  if holding[id] then
    answer('held', hold_again(id, terms_of(ARGV[first])))
  elseif call('ZSCORE', MAIN, id) then
    local info = parse(call('HGET', INFO, id))
    local label = info.text and string.match(info.text, '^%S+ %S+ ?(.*)$') or ''
    answer('held', confirm(id, info, call('ZSCORE', TTL, id), terms_of(ARGV[first] .. ' ' .. label)))
  elseif call('ZSCORE', WAITING, id) then
    answer('waiting')
  else
    forget_notification(id)
    answer('gone')
  end
end
-- Who is confirmed is so for whatever comes next.
if is_gathered() then flush() end
