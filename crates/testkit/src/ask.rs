//! What the tests of this crate ask a server by hand.

use redis::{Connection, FromRedisValue};

/// A command, its words between single blanks.
#[track_caller]
pub(crate) fn ask<T: FromRedisValue>(connection: &mut Connection, command: &str) -> T {
    let mut words = command.split(' ');
    redis::cmd(words.next().unwrap()).arg(words.collect::<Vec<_>>()).query(connection).unwrap()
}
