// How rows of numbers lie: one after the other, or cut into tiles, each in one piece of memory.
//
// Owns: where a row begins, and where in it a column is. Sixteen columns from a multiple of sixteen are in one piece.
//
//   plain   [row][column]
//   tiled   [row / 16][column / 32][row % 16][column % 32]          columns are a multiple of 32
#pragma once

static constexpr int DEPTH = 32;      // columns of a tile of bf16
static constexpr int TILE_ROWS = 16;  // and its rows

static inline long padded(long n, long unit) { return (n + unit - 1) / unit * unit; }

struct Layout {
    long columns;
    bool tiled = false;

    long row_step() const { return tiled ? DEPTH : columns; }             // to the next row of a tile
    long depth_step() const { return tiled ? TILE_ROWS * DEPTH : DEPTH; }  // to the next 32 columns
    long row(long row) const {
        return tiled ? row / TILE_ROWS * TILE_ROWS * columns + row % TILE_ROWS * DEPTH : row * columns;
    }
    long within(long column) const { return column / DEPTH * depth_step() + column % DEPTH; }
    long at(long row, long column) const { return this->row(row) + within(column); }
};
