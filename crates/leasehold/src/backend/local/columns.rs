//! How values of this library are stored in columns.

use rusqlite::Row;
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};

use crate::clock::{Span, Time};
use crate::name::Name;
use crate::{AcquisitionId, ClientId, Fence, LockId};

/// A number of 64 bits without a sign. SQLite has only numbers with a sign, so the bits are stored as one of these.
#[derive(Clone, Copy)]
pub(super) struct Bits(pub(super) u64);

/// A value of a public type. The wrapper keeps the traits of `rusqlite` out of the public API.
#[derive(Clone, Copy)]
pub(super) struct Column<T>(pub(super) T);

/// Stores a type as [`Bits`]. The second function returns `None` if a value of the type cannot have these bits.
macro_rules! stored_as_bits {
    ($($type:ty: $to_bits:expr, $from_bits:expr;)+) => {$(
        impl ToSql for $type {
            fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
                let bits: u64 = $to_bits(*self);
                Ok(bits.cast_signed().into())
            }
        }

        impl FromSql for $type {
            fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
                let stored = i64::column_result(value)?;
                $from_bits(stored.cast_unsigned()).ok_or(FromSqlError::OutOfRange(stored))
            }
        }
    )+};
}

stored_as_bits! {
    Bits: |number: Bits| number.0, |bits| Some(Bits(bits));
    Time: Time::micros, |micros| Some(Time::from_micros(micros));
    Span: Span::micros, |micros| Some(Span::from_micros(micros));
    Column<Fence>: |Column(fence): Self| fence.get(), |number| Some(Self(Fence::new(number)));
    Column<ClientId>: |Column(client): Self| client.number(), |bits| ClientId::from_number(bits).map(Self);
}

impl ToSql for Name {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.as_str().into())
    }
}

impl FromSql for Name {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        Self::new("name", value.as_str()?).map_err(FromSqlError::other)
    }
}

impl ToSql for Column<LockId> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.0.as_str().into())
    }
}

impl FromSql for Column<LockId> {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        value.as_str()?.parse().map(Self).map_err(FromSqlError::other)
    }
}

/// Reads a value that is stored as a [`Column`].
pub(super) fn value<T>(row: &Row<'_>, index: usize) -> rusqlite::Result<T>
where
    Column<T>: FromSql,
{
    Ok(row.get::<_, Column<T>>(index)?.0)
}

/// Reads an id from a column with its client and the next one, with its sequence.
pub(super) fn acquisition_id(row: &Row<'_>, first: usize) -> rusqlite::Result<AcquisitionId> {
    Ok(AcquisitionId::new(value(row, first)?, row.get::<_, Bits>(first + 1)?.0))
}
