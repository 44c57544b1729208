-- Nothing but what every command does.
--
-- ARGV    nothing
-- Result  nothing
expire()
grant()
return finish()
