//! The driver's log as text, so that a run that was kept can be checked again.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::{Change, Crowded, Lifetime, LifetimeEnd, LimitChange, Listed, Log};
use crate::clock::Micros;
use crate::fault::{Fault, Kind, Scope};

const FILE: &str = "driver.log";

impl Log {
    /// # Errors
    /// An [`io::Error`](std::io::Error) if the file cannot be written.
    pub fn save(&self, dir: &Path) -> std::io::Result<()> {
        std::fs::write(dir.join(FILE), self.to_string())
    }

    /// # Errors
    /// A message if the file does not exist, or cannot be read or parsed.
    pub fn load(dir: &Path) -> Result<Self, String> {
        std::fs::read_to_string(dir.join(FILE)).map_err(|error| error.to_string())?.parse()
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { began, ended, quiet_from, wall_offset, local, .. } = self;
        writeln!(f, "times {began} {ended} {quiet_from} {wall_offset} {local}")?;
        for fault in &self.faults {
            writeln!(f, "fault {fault}")?;
        }
        for Lifetime { worker, life, foreign, end } in &self.lives {
            write!(f, "life {worker} {life} {foreign} ")?;
            match end {
                LifetimeEnd::Killed(at) => writeln!(f, "killed {at}")?,
                LifetimeEnd::Stuck(at) => writeln!(f, "stuck {at}")?,
                LifetimeEnd::Broke(how) => writeln!(f, "broke {how}")?,
                LifetimeEnd::Done => writeln!(f, "done")?,
            }
        }
        for Change { thing, to, requested, answered } in &self.changes {
            let answered = answered.map_or_else(|| "-".to_owned(), |at| at.to_string());
            write!(f, "change {thing} {requested} {answered} ")?;
            match to {
                LimitChange::Capacity(capacity) => writeln!(f, "capacity {capacity}")?,
                LimitChange::Pause => writeln!(f, "pause")?,
                LimitChange::Resume => writeln!(f, "resume")?,
            }
        }
        for Crowded { at, thing, held } in &self.crowded {
            writeln!(f, "crowded {at} {thing} {held}")?;
        }
        for Listed { thing, id, from, to } in &self.listed {
            writeln!(f, "listed {thing} {id} {from} {to}")?;
        }
        for left in &self.leftovers {
            writeln!(f, "left {left}")?;
        }
        for doubt in &self.doubts {
            writeln!(f, "doubt {doubt}")?;
        }
        Ok(())
    }
}

impl FromStr for Log {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut log = Self::default();
        for line in text.lines() {
            log.read(line).ok_or_else(|| format!("{line:?} is not a line of the driver's log"))?;
        }
        Ok(log)
    }
}

impl Log {
    fn read(&mut self, text: &str) -> Option<()> {
        let (what, rest) = text.split_once(' ')?;
        let words: Vec<_> = rest.split(' ').collect();
        let number = |at: usize| words.get(at)?.parse::<Micros>().ok();
        let index = |at: usize| usize::try_from(number(at)?).ok();
        match what {
            "times" => {
                (self.began, self.ended) = (number(0)?, number(1)?);
                (self.quiet_from, self.wall_offset) = (number(2)?, number(3)?);
                self.local = words.get(4)?.parse().ok()?;
            }
            "fault" => {
                let kind = *Kind::ALL.iter().find(|kind| kind.as_str() == words[2])?;
                let scope = match *words.get(3)? {
                    "worker" => Scope::Worker(index(4)?),
                    "everybody" => Scope::Everybody,
                    "things" => Scope::Things(words.get(4)?.parse().ok()?),
                    _ => Scope::Nobody,
                };
                self.faults.push(Fault { kind, scope, begin: number(0)?, end: number(1)? });
            }
            "life" => {
                let end = match *words.get(3)? {
                    "killed" => LifetimeEnd::Killed(number(4)?),
                    "stuck" => LifetimeEnd::Stuck(number(4)?),
                    "broke" => LifetimeEnd::Broke(words[4..].join(" ")),
                    _ => LifetimeEnd::Done,
                };
                let foreign = words.get(2)?.parse().ok()?;
                let (worker, life) = (index(0)?, words.get(1)?.parse().ok()?);
                self.lives.push(Lifetime { worker, life, foreign, end });
            }
            "change" => {
                let to = match *words.get(3)? {
                    "capacity" => LimitChange::Capacity(words.get(4)?.parse().ok()?),
                    "pause" => LimitChange::Pause,
                    "resume" => LimitChange::Resume,
                    _ => return None,
                };
                let answered = if words[2] == "-" { None } else { Some(number(2)?) };
                self.changes.push(Change { thing: index(0)?, to, requested: number(1)?, answered });
            }
            "crowded" => {
                let crowded = Crowded { at: number(0)?, thing: index(1)?, held: number(2)? };
                self.crowded.push(crowded);
            }
            "listed" => {
                let (thing, id) = (index(0)?, (*words.get(1)?).to_owned());
                self.listed.push(Listed { thing, id, from: number(2)?, to: number(3)? });
            }
            "left" => self.leftovers.push(rest.to_owned()),
            "doubt" => self.doubts.push(rest.to_owned()),
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_log_is_read_back() {
        let life = |life, end| Lifetime { worker: 2, life, foreign: life == 4, end };
        let faults = Kind::ALL.iter().enumerate().map(|(at, kind)| {
            let things = Scope::Things([0, at % 16].into_iter().collect());
            let scope = [Scope::Worker(at), Scope::Everybody, Scope::Nobody, things][at % 4];
            Fault { kind: *kind, scope, begin: at as u64, end: Micros::MAX }
        });
        let log = Log {
            began: 1,
            ended: 2,
            quiet_from: 3,
            wall_offset: 4,
            local: true,
            faults: faults.collect(),
            lives: vec![
                life(1, LifetimeEnd::Killed(7)),
                life(2, LifetimeEnd::Broke("exit status: 101".to_owned())),
                life(3, LifetimeEnd::Stuck(9)),
                life(4, LifetimeEnd::Done),
            ],
            changes: vec![
                Change { thing: 1, to: LimitChange::Capacity(2), requested: 3, answered: Some(4) },
                Change { thing: 1, to: LimitChange::Pause, requested: 5, answered: None },
                Change { thing: 1, to: LimitChange::Resume, requested: 6, answered: Some(7) },
            ],
            crowded: vec![Crowded { at: 5, thing: 6, held: 7 }],
            listed: vec![Listed { thing: 2, id: "7Vd3kQ0aZx1-42".to_owned(), from: 8, to: 9 }],
            leftovers: vec!["the key x".to_owned()],
            doubts: vec!["it was stopped".to_owned()],
        };
        assert_eq!(log.to_string().parse(), Ok(log));
    }
}
