//! Reads a write-ahead log of SQLite without SQLite: detects a damaged one, and finds the newest header in it.
//!
//! SQLite does not report damage. When it first opens a log, it ignores frames without a valid checksum; after that it
//! does not check checksums at all, so that a damaged page looks like a file that is not a database. The format is
//! described in <https://www.sqlite.org/fileformat2.html#walformat>. All numbers in it are big-endian. The checksums
//! are computed over words in the byte order that the magic number selects.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

const MAGIC: u32 = 0x377f_0682;
const HEADER: usize = 32;
const FRAME_HEADER: usize = 24;

/// Whether there is a log whose header is invalid. A killed process does not leave one; a power cut may.
pub(super) fn has_bad_header(path: &Path) -> bool {
    File::open(path).and_then(|mut file| Log::read(&mut file)).is_ok_and(|log| log == Log::Damaged)
}

/// Whether the header or a frame of the log is invalid. A process that is killed while it writes may leave such a frame
/// too, but no reader uses it. So call this only after SQLite has reported an error.
pub(super) fn is_damaged(path: &Path) -> bool {
    let check = || -> io::Result<bool> {
        let mut file = BufReader::new(File::open(path)?);
        match Log::read(&mut file)? {
            Log::Empty => Ok(false),
            Log::Damaged => Ok(true),
            Log::Sound(log) => log.has_bad_frame(&mut file),
        }
    };
    check().unwrap_or(false)
}

/// Returns the newest copy of the database's first page in the log, if the log is valid and has one.
pub(super) fn first_page(path: &Path) -> Option<Vec<u8>> {
    let mut file = BufReader::new(File::open(path).ok()?);
    let Log::Sound(log) = Log::read(&mut file).ok()? else { return None };
    let mut frame = vec![0; FRAME_HEADER + log.page_size];
    let mut newest = None;
    // A frame with another salt is left over from before the log was restarted.
    while file.read_exact(&mut frame).is_ok() && frame[8..16] == log.salts {
        if number(&frame, 0) == 1 {
            newest = Some(frame[FRAME_HEADER..].to_vec());
        }
    }
    newest
}

#[derive(PartialEq)]
enum Log {
    Empty,
    Damaged,
    Sound(Header),
}

#[derive(PartialEq)]
struct Header {
    big_endian: bool,
    page_size: usize,
    salts: [u8; 8],
    sum: (u32, u32),
}

impl Log {
    fn read(file: &mut impl Read) -> io::Result<Self> {
        let mut start = Vec::with_capacity(HEADER);
        file.take(HEADER as u64).read_to_end(&mut start)?;
        if start.is_empty() {
            return Ok(Self::Empty);
        }
        let Ok(start) = <[u8; HEADER]>::try_from(start) else { return Ok(Self::Damaged) };
        let (magic, page_size) = (number(&start, 0), number(&start, 8));
        let big_endian = magic == MAGIC | 1;
        let sum = checksum((0, 0), &start[..24], big_endian);
        let valid = magic & !1 == MAGIC
            && (512..=65_536).contains(&page_size)
            && page_size.is_power_of_two()
            && sum == (number(&start, 24), number(&start, 28));
        if !valid {
            return Ok(Self::Damaged);
        }
        let mut salts = [0; 8];
        salts.copy_from_slice(&start[16..24]);
        Ok(Self::Sound(Header { big_endian, page_size: page_size as usize, salts, sum }))
    }
}

impl Header {
    fn has_bad_frame(mut self, file: &mut impl Read) -> io::Result<bool> {
        let mut frame = vec![0; FRAME_HEADER + self.page_size];
        loop {
            match file.read_exact(&mut frame) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                read => read?,
            }
            // A frame with another salt is left over from before the log was restarted.
            if frame[8..16] != self.salts {
                return Ok(false);
            }
            self.sum = checksum(self.sum, &frame[..8], self.big_endian);
            self.sum = checksum(self.sum, &frame[FRAME_HEADER..], self.big_endian);
            if self.sum != (number(&frame, 16), number(&frame, 20)) {
                return Ok(true);
            }
        }
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    word(&bytes[at..at + 4], true)
}

fn word(bytes: &[u8], big_endian: bool) -> u32 {
    let bytes = [bytes[0], bytes[1], bytes[2], bytes[3]];
    if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
}

fn checksum((mut first, mut second): (u32, u32), bytes: &[u8], big_endian: bool) -> (u32, u32) {
    for pair in bytes.chunks_exact(8) {
        first = first.wrapping_add(word(&pair[..4], big_endian)).wrapping_add(second);
        second = second.wrapping_add(word(&pair[4..], big_endian)).wrapping_add(first);
    }
    (first, second)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rusqlite::Connection;
    use testkit::local_store::LocalStore;

    use super::*;

    #[test]
    fn only_a_damaged_log_is_damaged() {
        let place = LocalStore::new();
        let log = place.directory().join("store-wal");
        assert!(!has_bad_header(&log) && !is_damaged(&log), "there is none");
        let connection = Connection::open(place.path()).unwrap();
        connection.pragma_update(None, "journal_mode", "WAL").unwrap();
        connection.execute_batch("CREATE TABLE a (b)").unwrap();
        for b in 0..100 {
            connection.execute("INSERT INTO a VALUES (zeroblob(?1))", [b * 10]).unwrap();
        }
        assert!(!has_bad_header(&log) && !is_damaged(&log), "SQLite made it");
        // Restart the log, with old frames left at its end.
        connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(())).unwrap();
        connection.execute("INSERT INTO a VALUES (1)", []).unwrap();
        assert!(!has_bad_header(&log) && !is_damaged(&log), "it was begun anew");

        let sound = fs::read(&log).unwrap();
        let damaged = |at: usize| {
            let mut content = sound.clone();
            content[at] ^= 1;
            fs::write(&log, content).unwrap();
            (has_bad_header(&log), is_damaged(&log))
        };
        for at in [0, 9, 17, 31] {
            assert_eq!(damaged(at), (true, true), "byte {at}");
        }
        for at in [HEADER + 3, HEADER + 20, HEADER + FRAME_HEADER + 500] {
            assert_eq!(damaged(at), (false, true), "byte {at}");
        }
        assert_eq!(damaged(sound.len() - 1), (false, false), "what is left over does not matter");
        fs::write(&log, &sound[..20]).unwrap();
        assert!(has_bad_header(&log), "it was cut off");
        fs::write(&log, "").unwrap();
        assert!(!has_bad_header(&log) && !is_damaged(&log), "it is empty");
    }
}
