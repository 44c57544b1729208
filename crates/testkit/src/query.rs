//! Commands that the tests of this crate send to a server directly.

use redis::{Connection, FromRedisValue};

/// Sends a command, written as words separated by single spaces, and returns its reply.
#[track_caller]
pub(crate) fn query<T: FromRedisValue>(connection: &mut Connection, command: &str) -> T {
    let mut words = command.split(' ');
    redis::cmd(words.next().unwrap()).arg(words.collect::<Vec<_>>()).query(connection).unwrap()
}
