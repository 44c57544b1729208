-- Nothing but what is done for every name.
--
-- ARGV    nothing
-- Result  nothing
tidy('asks')
