//! Commands as they are sent: arrays of strings in RESP.

use std::fmt::Display;
use std::io::Write;

/// Enough for most commands, and for the call that acquires one permit.
const USUAL_BYTES: usize = 1024;

/// A command. Its arguments are packed for sending as they are added.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RedisCommand {
    /// The number of arguments, and of the name before them.
    count: usize,
    /// The name and the arguments, each with its length before it.
    packed: Vec<u8>,
}

impl RedisCommand {
    pub(super) fn new(name: &str) -> Self {
        let mut command = Self { count: 0, packed: Vec::with_capacity(64) };
        command.push(name);
        command
    }

    /// Returns a script call, which has more and longer arguments than other commands.
    pub(super) fn script_call(hash: &str) -> Self {
        let mut call = Self { count: 0, packed: Vec::with_capacity(USUAL_BYTES) };
        call.push("EVALSHA");
        call.push(hash);
        call
    }

    /// Returns the command with one more argument.
    pub(super) fn arg(mut self, argument: impl AsRef<[u8]>) -> Self {
        self.push(argument);
        self
    }

    /// Returns the command with these arguments added.
    pub(super) fn args(mut self, arguments: impl IntoIterator<Item: AsRef<[u8]>>) -> Self {
        for argument in arguments {
            self.push(argument);
        }
        self
    }

    /// Returns the command with one more argument, as `Display` writes it.
    pub(super) fn arg_fmt(mut self, argument: impl Display) -> Self {
        self.push_fmt(argument);
        self
    }

    pub(super) fn push(&mut self, argument: impl AsRef<[u8]>) {
        self.push_parts(&[argument]);
    }

    /// Adds one argument that consists of these parts.
    pub(super) fn push_parts(&mut self, parts: &[impl AsRef<[u8]>]) {
        self.count += 1;
        let length = parts.iter().map(|part| part.as_ref().len()).sum();
        self.packed.reserve(length + 24);
        add_header(&mut self.packed, b'$', length);
        for part in parts {
            self.packed.extend_from_slice(part.as_ref());
        }
        self.packed.extend_from_slice(b"\r\n");
    }

    pub(super) fn push_fmt(&mut self, argument: impl Display) {
        self.count += 1;
        let start = self.packed.len();
        // The length comes first but is known last, so the text is moved.
        let _ = write!(self.packed, "{argument}");
        let end = self.packed.len();
        add_header(&mut self.packed, b'$', end - start);
        self.packed[start..].rotate_left(end - start);
        self.packed.extend_from_slice(b"\r\n");
    }

    /// Returns the name and the arguments.
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.packed[..];
        std::iter::from_fn(move || {
            let end = rest.iter().position(|byte| *byte == b'\r')?;
            let length: usize = std::str::from_utf8(&rest[1..end]).ok()?.parse().ok()?;
            let (argument, after) = rest[end + 2..].split_at(length);
            rest = &after[2..];
            Some(argument)
        })
    }
}

/// Packs commands for sending.
pub(super) fn pack(commands: &[RedisCommand]) -> Vec<u8> {
    // More than enough for the header of a command.
    let room = |command: &RedisCommand| command.packed.len() + 24;
    let mut packed = Vec::with_capacity(commands.iter().map(room).sum());
    for command in commands {
        add_header(&mut packed, b'*', command.count);
        packed.extend_from_slice(&command.packed);
    }
    packed
}

/// Writes a type and a number.
fn add_header(packed: &mut Vec<u8>, kind: u8, number: usize) {
    packed.push(kind);
    packed.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    packed.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_packed_as_the_redis_crate_packs_them() {
        let long = "x".repeat(1234);
        let command = RedisCommand::new("SET").arg("a\r\nb").arg("").arg(&long).arg_fmt(-12);
        let command = command.arg_fmt(u64::MAX).arg_fmt(format_args!("{} {}", 1, 2.5)).arg_fmt("");
        let command = command.args(["c", "d"]).args(Vec::<String>::new());
        let mut expected = redis::cmd("SET");
        expected.arg("a\r\nb").arg("").arg(&long).arg(-12).arg(u64::MAX).arg("1 2.5").arg("");
        expected.arg(&["c", "d"]);
        assert_eq!(pack(std::slice::from_ref(&command)), expected.get_packed_command());
        let arguments = expected.args_iter().map(|argument| match argument {
            redis::Arg::Simple(bytes) => bytes,
            other => panic!("{other:?}"),
        });
        assert!(command.iter().eq(arguments));
        let call = RedisCommand::script_call("hash").arg_fmt(0);
        let mut second = redis::cmd("EVALSHA");
        second.arg("hash").arg(0);
        let both = [expected.get_packed_command(), second.get_packed_command()].concat();
        assert_eq!(pack(&[command, call]), both);
    }
}
